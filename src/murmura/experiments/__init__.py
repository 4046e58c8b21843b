"""Tasks, recipes and the experiments that compare ways of synchronising."""

from murmura.experiments.convergence import Curve, run_convergence
from murmura.experiments.recipes import Recipe, parse_algorithms, recipe_named
from murmura.experiments.tasks import TASKS, Task, task_named
from murmura.experiments.training import Training

__all__ = [
    "TASKS",
    "Curve",
    "Recipe",
    "Task",
    "Training",
    "parse_algorithms",
    "recipe_named",
    "run_convergence",
    "task_named",
]
