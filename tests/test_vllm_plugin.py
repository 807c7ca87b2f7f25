"""The plugin for released vLLMs, where there is no vLLM: whom it leaves alone, and what it says. What it drafts is
compared with vLLM and with our own chains by ``tools.check_vllm``."""

import sys
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest

import gumiho_vllm


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    for member, value in members.items():
        setattr(made, member, value)
    return made


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is registered with transformers, in a vLLM of an unknown release that does not know Gumiho."""
    found: dict[str, Any] = {}

    class AutoConfig:
        @staticmethod
        def register(name: str, kind: Any, exist_ok: bool) -> None:
            found[name] = kind

    for name, members in {
        "vllm": {"__version__": "0.99.1+cpu"},
        "vllm.transformers_utils": {},
        "vllm.transformers_utils.config": {"_CONFIG_REGISTRY": {}},
        "transformers": {"AutoConfig": AutoConfig, "PretrainedConfig": object},
        "transformers.models": {},
        "transformers.models.auto": {},
        "transformers.models.auto.configuration_auto": {"CONFIG_MAPPING": {}},
    }.items():
        monkeypatch.setitem(sys.modules, name, module(name, **members))
    return found


def test_vllm_finds_the_plugin() -> None:
    (found,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "gumiho")
    assert found.load() is gumiho_vllm.register


@pytest.mark.parametrize("missing", ["vllm", "transformers"])
def test_nothing_happens_without_vllm(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    gumiho_vllm.register()
    assert not registered


@pytest.mark.parametrize(
    ("where", "table"),
    [
        ("vllm.transformers_utils.config", "_CONFIG_REGISTRY"),
        ("transformers.models.auto.configuration_auto", "CONFIG_MAPPING"),
    ],
)
def test_a_vllm_that_knows_gumiho_is_left_alone(registered: dict[str, Any], where: str, table: str) -> None:
    getattr(sys.modules[where], table)["gumiho"] = object
    gumiho_vllm.register()
    assert not registered


def test_another_release_says_so_once_a_gumiho_is_loaded(registered: dict[str, Any]) -> None:
    """And only then: other models are not affected."""
    gumiho_vllm.register()
    with pytest.raises(
        ValueError, match=r"run with vLLM 0\.32\.0, and this is 0\.99\.1: install one of these, or a vLLM"
    ):
        registered["gumiho"](model={"vocab_size": 10})
