"""optimum's generation over ONNX Runtime, in fp32: transformers' loop over a graph with a key-value cache."""

from pathlib import Path
from typing import Any

from tools.peers.protocol import Text, Way, serve
from tools.peers.transformers import generate

REQUIREMENTS = ("torch==2.13.0",), ("optimum[onnxruntime]==2.1.0", "optimum-onnx==0.1.0", "onnxruntime==1.31.1")


def ways() -> list[Way]:
    return [Way("optimum, greedy", "fp32")]


def convert(checkpoint: Path, out: Path, weights: str) -> None:
    from optimum.onnxruntime import ORTModelForCausalLM

    ORTModelForCausalLM.from_pretrained(checkpoint, export=True, use_cache=True).save_pretrained(out)


class Loaded:
    def __init__(self, model: str, threads: int) -> None:
        import onnxruntime
        import optimum.version
        import torch
        from optimum.onnxruntime import ORTModelForCausalLM

        torch.set_num_threads(threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.torch = torch
        self.model = ORTModelForCausalLM.from_pretrained(model, session_options=options)
        self.versions = {"optimum": optimum.version.__version__, "onnxruntime": onnxruntime.__version__}

    def generate(self, ids: list[int], count: int, **setting: Any) -> Text:
        return generate(self.torch, self.model, ids, count, **setting)


if __name__ == "__main__":
    serve(Loaded, convert)
