"""Schedules: numbers in an optimizer's parameter groups, as functions of a step tensor.

The step (`last_epoch`, int64) and the current number (float64) are tensors. In a traced step both are state, like the
weights: `schedule.step()` is recorded, the executable counts steps itself, and nothing is recompiled. In eager PyTorch
the groups hold plain Python numbers, as with `torch.optim.lr_scheduler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..errors import ScheduleError

Tensor = torch.Tensor
Tags = str | None | Iterable[str | None]


def schedules_of(optimizer: torch.optim.Optimizer) -> list[Schedule]:
    """The schedules that set numbers in the groups of `optimizer`, excluding parts of composed schedules."""
    return optimizer.__dict__.setdefault("_firstloss_schedules", [])


class Schedule:
    """Base class of schedules. A subclass defines `value`, and calls this constructor last.

    Like `torch.optim.lr_scheduler.LRScheduler`, but the number depends only on the step: other writes to the group are
    overwritten.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        param_group_key: the number to set, such as "lr" or "weight_decay"; a pair such as ("betas", 0) means an element
            of a tuple.
        param_group_tags: set it only in groups whose "tags" include one of these; None among them means groups without
            tags. By default all groups.
        last_epoch: the last step, as in PyTorch; -1 starts from the beginning.

    Attributes:
        last_epoch: the current step, an int64 scalar tensor: the number of calls of `step` since the beginning.

    Raises:
        ScheduleError: if there is nothing to set.
    """

    param_group_key: str | tuple[str, int] = "lr"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        param_group_key: str | tuple[str, int] | None = None,
        param_group_tags: Tags = None,
        last_epoch: int = -1,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ScheduleError(
                f"{type(self).__name__} takes a torch.optim.Optimizer, not an object of type "
                f"{type(optimizer).__name__}."
            )
        self.optimizer = optimizer
        if param_group_key is not None and param_group_key != self.param_group_key:
            self.param_group_key = param_group_key
        if not self.param_group_key:
            raise ScheduleError(
                f"{type(self).__name__} does not know which number to set: define param_group_key in the class, as "
                '"weight_decay" or ("betas", 0), or pass it.'
            )
        if not isinstance(last_epoch, int) or last_epoch < -1:
            raise ScheduleError(f"last_epoch={last_epoch!r} is not an integer of at least -1.")
        self.param_group_tags: frozenset[Any] | None = (
            None if param_group_tags is None else frozenset(_as_tags(param_group_tags))
        )
        self.last_epoch: Tensor = torch.full((), last_epoch + 1, dtype=torch.int64, device="cpu")
        self._value = torch.zeros((), dtype=torch.float64, device="cpu")
        self._in_tensors = False
        if not any(True for _ in self._groups()):
            raise ScheduleError(self._no_target())
        if not isinstance(self.param_group_key, str):
            key, index = self.param_group_key
            lengths = {len(group[key]) if isinstance(group[key], (tuple, list)) else 0 for group in self._groups()}
            if not 0 <= index < min(lengths):
                raise ScheduleError(
                    f"{type(self).__name__} cannot set element {index} of {key!r}, which has only {min(lengths)} in a "
                    "group."
                )
        self._value.copy_(self.value(self.last_epoch))
        self._follow()
        self._attach()
        self._set_groups()

    def value(self, step: Tensor) -> Tensor:
        """The number at `step`.

        Args:
            step: integers, of any shape: `schedule.value(torch.arange(1000))` is the whole curve.

        Returns:
            A float64 tensor with the shape of `step`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define value(step)")

    @torch.no_grad()
    def step(self) -> None:
        """Advance by one step; call it after `optimizer.step()`."""
        self._check_no_conflict()
        self.last_epoch.add_(1)
        self._value.copy_(self.value(self.last_epoch))
        self._follow()
        if torch.compiler.is_compiling():
            self._in_tensors = True
        if not self._in_tensors:
            self._set_groups()

    def get_last_lr(self) -> list[Any]:
        """The current number of each group that is set; in a traced step, as tensors.

        Returns:
            Floats; in a traced step, float64 scalar tensors.
        """
        traced = torch.compiler.is_compiling()
        numbers = [self._number(group) for group in self._groups()]
        return [number.clone() if traced else float(number) for number in numbers]

    get_last_value = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        """The position of the schedule. Its settings are not included: they are given to the constructor.

        Returns:
            `{"last_epoch": step}`, an int64 scalar tensor.
        """
        return {"last_epoch": self.last_epoch}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position of another schedule.

        Args:
            state_dict: returned by `state_dict` of a schedule, Firstloss's or PyTorch's.

        Raises:
            ScheduleError: if `state_dict` has no step.
        """
        if "last_epoch" not in state_dict:
            raise ScheduleError(f"a schedule's state has the step as 'last_epoch'; this one has {sorted(state_dict)}.")
        self.last_epoch.copy_(torch.as_tensor(state_dict["last_epoch"]))
        self._value.copy_(self.value(self.last_epoch))
        self._follow()
        self._set_groups()

    def detach(self) -> None:
        """Stop setting the number, as parts of a composed schedule do."""
        schedules_of(self.optimizer)[:] = [s for s in schedules_of(self.optimizer) if s is not self]

    # -- for the runtime --

    def use_tensors(self) -> list[Tensor]:
        """Put tensors into the groups from here on, so that changes of the number need no write to the groups.

        Returns:
            The schedule's state.
        """
        self._check_no_conflict()
        self._in_tensors = True
        self._set_groups()
        return [self.last_epoch, *self.numbers()]

    def numbers(self) -> list[Tensor]:
        """The tensors in the groups, if `use_tensors` was called.

        Returns:
            Float64 scalar tensors.
        """
        return [self._value]

    # -- for schedules with a different number for each group --

    def _number(self, group: dict[str, Any]) -> Tensor:
        """The tensor among `numbers` for a group."""
        return self._value

    def _follow(self) -> None:
        """Update the numbers derived from `_value` after it has changed."""

    # -- the groups --

    def _groups(self) -> Iterator[dict[str, Any]]:
        key = self.param_group_key if isinstance(self.param_group_key, str) else self.param_group_key[0]
        for group in self.optimizer.param_groups:
            tags = group.get("tags") or (None,)
            wanted = self.param_group_tags is None or not self.param_group_tags.isdisjoint(_as_tags(tags))
            if wanted and key in group:
                yield group

    def _set_groups(self) -> None:
        for group in self._groups():
            number = self._number(group) if self._in_tensors else float(self._number(group))
            if isinstance(self.param_group_key, str):
                group[self.param_group_key] = number
            else:
                key, index = self.param_group_key
                group[key] = (*group[key][:index], number, *group[key][index + 1 :])

    def _attach(self) -> None:
        others = schedules_of(self.optimizer)
        if not others:
            self.optimizer.register_state_dict_post_hook(_as_numbers)
            self.optimizer.register_load_state_dict_post_hook(_reapply)
        others.append(self)

    def _check_no_conflict(self) -> None:
        own = {id(group) for group in self._groups()}
        for other in schedules_of(self.optimizer):
            if other is self or other.param_group_key != self.param_group_key:
                continue
            if any(id(group) in own for group in other._groups()):
                raise ScheduleError(
                    f"{type(self).__name__} and {type(other).__name__} both set {self.param_group_key!r} in the same "
                    "parameter group. Compose them with SequentialLR or ChainedLR, or detach() the one that has ended."
                )

    def _no_target(self) -> str:
        keys = sorted({key for group in self.optimizer.param_groups for key in group if key != "params"})
        tags = sorted({str(t) for group in self.optimizer.param_groups for t in _as_tags(group.get("tags") or (None,))})
        return (
            f"{type(self).__name__} finds no parameter group with {self.param_group_key!r}"
            + (f" and one of the tags {sorted(map(str, self.param_group_tags))}" if self.param_group_tags else "")
            + f". The optimizer's groups have {', '.join(keys)}; their tags are {', '.join(tags)}."
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.param_group_key!r} for {type(self.optimizer).__name__}>"


def _as_tags(tags: Any) -> tuple[Any, ...]:
    return (tags,) if tags is None or isinstance(tags, str) else tuple(tags)


def _as_numbers(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state-dict hook that replaces tensors in the groups by numbers, so that eager PyTorch can load the state."""
    values = [value for schedule in schedules_of(optimizer) for value in schedule.numbers()]

    def number(entry: Any) -> Any:
        return float(entry) if any(entry is value for value in values) else entry

    def plain(entry: Any) -> Any:
        return tuple(map(number, entry)) if isinstance(entry, tuple) else number(entry)

    groups = [{k: v if k == "params" else plain(v) for k, v in g.items()} for g in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def _reapply(optimizer: torch.optim.Optimizer) -> None:
    """A hook that restores the schedules' numbers after a state dict has been loaded into the groups."""
    for schedule in schedules_of(optimizer):
        schedule._set_groups()
