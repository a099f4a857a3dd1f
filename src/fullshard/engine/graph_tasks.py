"""Which of autograd's backwards runs on this thread."""

from __future__ import annotations

from collections.abc import Callable

import torch

NO_TASK = -1
current_task: Callable[[], int] = torch._C._current_graph_task_id
