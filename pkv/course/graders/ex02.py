"""How exercise 02 is judged: bounds by a row's own length, what they save, neutral states, and a kernel that plans."""

from pkv.course.graders.ex02_bounds import EX02_1
from pkv.course.graders.ex02_items import EX02_2
from pkv.course.graders.ex02_kernels import EX02_5
from pkv.course.graders.ex02_merging import EX02_4
from pkv.course.graders.ex02_states import EX02_3

TASKS = (EX02_1, EX02_2, EX02_3, EX02_4, EX02_5)
