"""Experiments: tasks, training runs, the comparison of algorithms, and their reports."""

from murmura.tools.experiments.convergence import Curve, run_convergence
from murmura.tools.experiments.loop import Training
from murmura.tools.experiments.recipes import parse_algorithms
from murmura.tools.experiments.tasks import TASKS, Task, task_named

__all__ = ["TASKS", "Curve", "Task", "Training", "parse_algorithms", "run_convergence", "task_named"]
