"""The course's exercises: check, hint and progress in a notebook; graders and their pytest plugin."""

from pkv.course.checking import check, hint, show_progress

__all__ = ["check", "hint", "show_progress"]
