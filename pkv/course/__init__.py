"""The course's exercises: check, hint and progress in a notebook; graders and their pytest plugin."""

from pkv.course.checking import check, hint, show_progress
from pkv.course.learnerparts import learner_parts

__all__ = ["check", "hint", "learner_parts", "show_progress"]
