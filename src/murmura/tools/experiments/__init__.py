"""Experiments: tasks, training runs, the comparison of algorithms, and their reports."""

from murmura.tools.experiments.loop import Training
from murmura.tools.experiments.recipes import parse_algorithms
from murmura.tools.experiments.tasks import TASKS, Task, task_named

__all__ = ["TASKS", "Task", "Training", "parse_algorithms", "task_named"]
