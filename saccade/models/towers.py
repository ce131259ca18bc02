"""Towers that a plugin puts beside those of a model's family, such as an encoder of time series.

family = TOWERS["series"].plug(family, config.model.series)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from saccade.models.families import Family
from saccade.registry import Table
from saccade.system.contents import File


@dataclass(frozen=True, kw_only=True)
class PluggedTower:
    plug: Callable[[Family, Any], Family]  # the family with the tower, if its settings ask for one
    attach: Callable[..., None]  # (model, family, seed=): gives the model the tower's module
    detached: Callable[[Any], AbstractContextManager[Any]]  # inside, the model is without it
    file: Callable[..., File]  # (module, copy=): its weights, beside those of the model
    fingerprint: Callable[[Any], bytes]  # of the settings that decide how many tokens it makes


TOWERS: Table[PluggedTower] = Table("towers", {})
