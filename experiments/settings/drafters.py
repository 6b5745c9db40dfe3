"""Builds the drafter of a run: `drafter=ngram` and `drafter=model` propose tokens where these are real; in simulation their outcomes are drawn."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbatch import ConfigError, ModelSpec
from cbatch.drafts import Drafter, ModelDrafter, NgramDrafter, draft_model
from cbatch.model.checkpoint import spec_from_checkpoint
from cbatch.sim.drafter import SurvivalsDrafter
from experiments.settings.construct import check_section, construct
from experiments.setup.presets import load_spec
from experiments.store.run_folder import survivals_of


def model_drafter(
    path: str | None = None,
    model: str | None = None,
    max_drafts: int = 3,
    survivals: Any = None,
    alpha: float | None = None,
    seed: int = 0,
    simulated: bool = False,
) -> Drafter:
    """Returns a drafter that is a model. path: its checkpoint. model: in its place, a preset with random weights. survivals, alpha: in simulation.

    Raises ConfigError unless one of `path` and `model` is given, and outcomes are given in simulation alone; CbatchError if the model cannot be read.
    """
    if (path is None) == (model is None):
        raise ConfigError("drafter=model: give drafter.path=FOLDER, a checkpoint, or drafter.model=NAME, of conf/model")
    if path is not None and not Path(path).expanduser().is_dir():
        raise ConfigError(f"drafter.path={path} is not a folder; give a checkpoint's folder")
    spec = load_spec(str(model), "drafter.model") if path is None else spec_from_checkpoint(Path(path).expanduser())
    if _is_drawn("model", simulated, survivals, alpha):
        return SurvivalsDrafter(survivals, alpha, max_drafts, seed=seed, model=spec)
    return ModelDrafter(spec, max_drafts)


def ngram_drafter(
    max_drafts: int = 3,
    min_n: int = 5,
    max_n: int = 5,
    survivals: Any = None,
    alpha: float | None = None,
    seed: int = 0,
    simulated: bool = False,
) -> Drafter:
    """Returns the drafter of n-grams; in simulation of drafts that take no time of their own. survivals, alpha: in simulation.

    Raises ConfigError: a number out of range; outcomes are given with real tokens, or not given in simulation.
    """
    real = NgramDrafter(max_drafts, min_n, max_n)
    drawn = _is_drawn("ngram", simulated, survivals, alpha)
    return SurvivalsDrafter(survivals, alpha, max_drafts, seed=seed) if drawn else real


def _is_drawn(name: str, simulated: bool, survivals: object, alpha: object) -> bool:
    """Returns whether outcomes are drawn. Raises ConfigError unless they are given in simulation alone."""
    given = survivals is not None or alpha is not None
    if simulated and not given:
        problem = "a simulation has no tokens, and draws which drafts are accepted"
        raise ConfigError(f"drafter={name}: {problem}; give drafter.alpha=0.8 or drafter.survivals='[.8,.6,.4]'")
    if given and not simulated:
        raise ConfigError("drafter.survivals, drafter.alpha: real drafts are compared, not drawn; leave them out")
    return simulated


_BY_BACKEND = {f"{__name__}.{make.__name__}" for make in (model_drafter, ngram_drafter)}


def make_drafter(section: object, model: ModelSpec, simulated: bool) -> Drafter:
    """Builds the drafter that a section describes. Raises like `construct`, and ConfigError if its vocabulary is not the model's."""
    if isinstance(section, Mapping) and isinstance(folder := section.get("survivals"), str):
        section = {**section, "survivals": survivals_of(Path(folder))}
    if check_section("drafter", section)["_target_"] in _BY_BACKEND:
        section = {**check_section("drafter", section), "simulated": simulated}
    drafter: Drafter = construct("drafter", section, needs=[name for name in dir(Drafter) if name[0] != "_"])
    draft_model(drafter, model)
    return drafter
