"""How each task is judged: cases, right answers, and the mistakes that people make; ex01.py has the tasks of ex01."""
