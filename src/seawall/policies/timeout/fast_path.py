"""The success paths of a timeout: lines that start and stop the time of a call.

They repeat `enter` and `leave` of the two flows where the limit is constant and no other deadline
is nearer, and call them for the rest; `tests/test_fastpath.py` compares them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from seawall.context import deadline_var
from seawall.runtime.layers import Inline

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.policies.timeout.async_flow import AsyncTimeout
    from seawall.policies.timeout.policy import CooperativeTimeout


def set_deadline(flow: CooperativeTimeout, clock: Clock) -> Inline:
    """Return the lines that set the deadline of a plain function."""
    return Inline(
        names={"clock": clock, "flow": flow, "set": deadline_var.set},
        enter=(
            "if {flow}.constant and held_ is None:",
            "    {ticket} = held_ = [now_ + {flow}.constant, {clock}, None, True]",
            "    {set}({ticket})",
            "else:",
            "    {ticket} = held_ = {enter}(now_)",
        ),
        leave=("{ticket}[3] = None",),
    )


def join_queue(flow: AsyncTimeout, clock: Clock) -> Inline:
    """Return the lines that put the task into the queue of its loop, and take it out again."""
    find_task, names = _task_finder()
    return Inline(
        names={"clock": clock, "flow": flow, "set": deadline_var.set, **names},
        enter=(
            "{lane} = {flow}.lane",
            "{pending} = {lane}.pending",
            "{at} = now_ + {lane}.seconds",
            *find_task,
            "if held_ is not None and (held_[1] is not {clock} or held_[0] < {at}):",
            "    {task} = None",
            "if {task} is not None and {pending}.setdefault({task}, {at}) is {at}:",
            "    {ticket} = [{at}, {clock}, held_, {task}, {task}.cancelling(), {lane}]",
            "    {set}({ticket})",
            "else:",
            "    {task} = None",
            "    {ticket} = {enter}(now_)",
            "held_ = {ticket}",
        ),
        leave=(
            "try:",
            "    del {pending}[{task}]",  # there is no entry if `enter` was called
            "    {ticket}[3] = None",
            "except KeyError_:",
            "    {leave}({ticket}, OK_, value_, end_)",
        ),
    )


def _task_finder() -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the lines that find the running task, if it is in the loop of the lane."""
    if sys.version_info >= (3, 12):
        from asyncio import current_task

        return (
            "try:",
            "    {task} = {current_task}()",
            "    if {task} is not None and {task}.get_loop() is not {lane}.loop:",
            "        {task} = None",
            "except RuntimeError_:",
            "    {task} = None",
        ), {"current_task": current_task}
    # Inlined copy of `_expiry.current_task`: on 3.11 the obvious way is slow. Keep in sync.
    from threading import get_ident

    from seawall._expiry import current_tasks

    return (
        "try:",
        "    {loop} = {lane}.loop",
        "    {task} = {tasks}[{loop}] if {loop}._thread_id == {get_ident}() else None",
        "except KeyError_:",
        "    {task} = None",
    ), {"get_ident": get_ident, "tasks": current_tasks}
