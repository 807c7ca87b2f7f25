"""A peer of the benchmark that needs no packages: it counts on from the prompt's last token, and fails where it is told
to."""

import os
import time
from pathlib import Path
from typing import Any

from tools.peers.protocol import Text, Way, serve

REQUIREMENTS: tuple[tuple[str, ...], ...] = ()


def ways() -> list[Way]:
    return [
        Way("plain", "fp32"),
        Way("drafting", "fp32", "plain", options={"step": 2}, settings=[{"wait": 0.02}, {"wait": 0.0}]),
        Way("wrong", "int4", "plain", settings=[{"wrong": True}]),
        Way("no draft model", "fp32", "plain", draft=True),
        Way("cannot load", "fp32", options={"fault": "no such weights\nat all"}),
        Way("cannot convert", "fp8"),
        Way("cannot convert either", "fp8", "cannot convert", settings=[{"wait": 0.0}]),
        Way("dies", "fp32", options={"dies": True}),
    ]


def convert(checkpoint: Path, out: Path, weights: str) -> None:
    with (out.parent.parent / "converted").open("a") as log:
        print(weights, file=log)
    if weights == "fp8":
        raise NotImplementedError("no fp8 here")
    out.mkdir()
    (out / "weights").write_text(weights)


class Loaded:
    def __init__(self, model: str, threads: int, step: int = 1, fault: str = "", dies: bool = False) -> None:
        print("libraries like to print")
        if fault:
            raise ValueError(fault)
        assert (Path(model) / "weights").is_file()
        self.step, self.dies, self.versions = step, dies, {"fake": "1.0"}

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        if self.dies:
            os.write(2, b"out of something\n")
            os._exit(9)
        time.sleep(setting.get("wait", 0.0))
        tokens = [ids[-1] + 1 + i for i in range(count)]
        if setting.get("wrong"):
            tokens[2] = 0
        return Text(
            tokens,
            0.001 + (count - 1) * 0.01 / self.step + setting.get("wait", 0.0),
            0.001,
            1,
            (count - 1) // self.step,
        )


if __name__ == "__main__":
    serve(Loaded, convert)
