"""Sessions of ONNX Runtime that compute for stand-ins. Tests open the same graphs again and again, which takes longer
than what they test, so that each is kept."""

from pathlib import Path

import onnxruntime as ort

KEPT: dict[tuple[bytes, tuple[tuple[int, int], ...]], ort.InferenceSession] = {}


def session(graph: bytes, folder: str) -> ort.InferenceSession:
    """folder: of the weights that a graph names. Copies of a bundle have them in common as hard links."""
    found = [file.stat() for file in sorted(Path(folder, "weights").iterdir())]
    key = graph, tuple((file.st_ino, file.st_mtime_ns) for file in found)
    if key not in KEPT:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        KEPT[key] = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return KEPT[key]
