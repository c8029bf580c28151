"""Tasks: where prompts come from, in which order a run takes them, and their token ids.

What a right answer is worth is for ``rewards``; tasks know neither engines nor the policy. Read ``load``
first.
"""

from gspo.tasks.check import TaskReport, check_task
from gspo.tasks.columns import Columns, recognise_columns
from gspo.tasks.encoding import encode_prompt, encode_task
from gspo.tasks.generators import addition, addition_alphabet, characters, worked_addition
from gspo.tasks.load import load_task
from gspo.tasks.sources import first_rows
from gspo.tasks.task import LoadReport, Overlong, RowProblem, Task, TaskOptions, shared_prompts

__all__ = [
    "Columns",
    "LoadReport",
    "Overlong",
    "RowProblem",
    "Task",
    "TaskOptions",
    "TaskReport",
    "addition",
    "addition_alphabet",
    "characters",
    "check_task",
    "encode_prompt",
    "encode_task",
    "first_rows",
    "load_task",
    "recognise_columns",
    "shared_prompts",
    "worked_addition",
]
