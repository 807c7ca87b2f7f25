"""What a training is asked for, and values that no run can have."""

from dataclasses import dataclass, replace
from pathlib import Path

from runtime.errors import InputError, reason

from ..checkpoints.families import EAGLE, EAGLE_3, GUMIHO, HYDRA, MEDUSA, SMALL

# Serial layers and heads without an option or --init. Released: Medusa 5 heads, Hydra 4.
USUAL = {GUMIHO: (2, 5), EAGLE: (1, 0), EAGLE_3: (1, 0), MEDUSA: (0, 5), HYDRA: (0, 4), SMALL: (4, 0)}
_LEAST_WINDOW, _MOST_THREADS = 48, 1024
_LAYERS, _HEADS, _INIT, _HIDDEN = "--serial-layers", "--heads", "--init", "--hidden-weight"
_TAKEN = {
    GUMIHO: {_LAYERS, _HEADS, _INIT, _HIDDEN},
    EAGLE: {_INIT, _HIDDEN},
    EAGLE_3: set[str](),
    MEDUSA: {_HEADS},
    HYDRA: {_HEADS},
    SMALL: {_LAYERS},
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of ``gumiho train``."""

    target: str
    out: Path
    data: tuple[Path, ...]
    work: Path | None
    init: str | None
    only: str | None
    tokens: int
    window: int
    conversations: int
    family: str | None
    serial_layers: int | None
    heads: int | None
    draft_vocab: int | None
    steps: int
    batch: int
    anchors: int
    rate: float | None
    warmup: int
    depth_decay: float
    hidden_weight: float | None
    seed: int
    device: str
    dtype: str | None
    threads: int | None
    shard_target: bool
    no_hidden_cache: bool
    save_every: float
    evaluate_every: float

    @property
    def distance_weight(self) -> float:
        """``hidden_weight``, or the one that the family has without it."""
        usual = 0.1 if _HIDDEN in _TAKEN[self.family or GUMIHO] else 0.0
        return usual if self.hidden_weight is None else self.hidden_weight


def settled(config: TrainConfig) -> TrainConfig:
    """With folders' names as the system has them. Raises InputError for values that no run can have."""
    least = {
        "tokens": 1,
        "window": _LEAST_WINDOW,
        "conversations": 1,
        "serial_layers": 1,
        "heads": 0,
        "draft_vocab": 2,
        "steps": 1,
        "batch": 1,
        "anchors": 32,
        "warmup": 0,
        "threads": 1,
    }
    for name, smallest in least.items():
        value = getattr(config, name)
        if value is not None and value < smallest:
            raise InputError(f"--{name.replace('_', '-')} is {value}: give {smallest} or more")
    if config.threads is not None and config.threads > _MOST_THREADS:
        raise InputError(f"--threads is {config.threads}: give 1 to {_MOST_THREADS}")
    if not 0 <= config.seed < 1 << 63:
        raise InputError(f"--seed is {config.seed}: give 0 to 2**63 - 1")
    if config.init == "":
        raise InputError("--init is empty: name a drafter, or leave it out")
    config = replace(config, out=_expanded("out", config.out), work=config.work and _expanded("work", config.work))
    if config.out.name in ("", ".."):
        raise InputError(f"--out '{config.out}' has no name of its own to write the drafter under: name another folder")
    for name in ("rate", "depth_decay", "save_every", "evaluate_every"):
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{name.replace('_', '-')} is {value}: give a number above 0")
    family = config.family or GUMIHO
    given = {_LAYERS: config.serial_layers, _HEADS: config.heads, _INIT: config.init, _HIDDEN: config.hidden_weight}
    for option, value in given.items():
        if value is not None and option not in _TAKEN[family]:
            raise InputError(f"--family {family} takes no {option}: leave it out")
    if family in (MEDUSA, HYDRA) and config.heads == 0:
        raise InputError(f"--heads is 0, and a {family.capitalize()} is its heads: give 1 or more")
    if not 0 <= config.distance_weight < float("inf"):
        raise InputError(f"--hidden-weight is {config.hidden_weight}: give a number from 0")
    if config.anchors % 32:
        raise InputError(f"--anchors is {config.anchors}: give a multiple of 32")
    if config.shard_target and config.no_hidden_cache:
        raise InputError("--shard-target needs the hidden states on disk: leave out --no-hidden-cache")
    return config


def _expanded(option: str, folder: Path) -> Path:
    try:
        return folder.expanduser()
    except RuntimeError as error:  # an unknown user's home
        raise InputError(
            f"--{option} {folder} cannot be the name of a folder ({reason(error)}): name another one"
        ) from None
