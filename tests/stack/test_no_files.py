"""A FIFO in the place of a file is refused with a sentence: its reader would wait for ever."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KYB = (sys.executable, "-m", "kybernate")
KUBELET = (sys.executable, "-m", "kybernate.dev.fakes.kubelet", "--dir", "DIR", "--run-dir", "DIR")
ROUTER, MANAGER = ((sys.executable, "-m", f"services.{name}") for name in ("router", "gpu_manager"))


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ((*KYB, "up", "--pods", "FILE"), ""),
        ((*KYB, "up", "--config", "FILE"), ""),
        ((*KYB, "config", "check", "FILE"), ""),
        ((*KYB, "onboard", "FILE"), ""),
        ((*KYB, "simulate", "FILE"), ""),
        ((*KYB, "simulate", "TRACE", "--measured", "FILE"), ""),
        ((*KYB, "bus", "keys", "--out", "KEYS"), ""),
        ((*KYB, "status", "--url", "http://127.0.0.1:9"), "KYB_API_KEY_FILE"),
        ((*KUBELET, "--pods", "FILE"), ""),
        (MANAGER, "KYB_CONFIG"),
        *((ROUTER, f"KYB_{name}_FILE") for name in ("API_KEYS", "TLS_CERT", "NATS_CREDS", "NATS_CA", "NATS_CERT")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[2:4]),
)
def test_what_is_named_as_a_file_and_is_none_is_refused_at_once(
    tmp_path: Path, command: tuple[str, ...], setting: str
) -> None:
    (keys := tmp_path / "keys").mkdir()
    file = keys / "router.nk"
    os.mkfifo(file)
    (trace := tmp_path / "trace.csv").write_text("arrival_s,model,prompt_tokens,output_tokens\n0,a,1,1\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    env |= {setting: str(file)} if setting else {}
    words = [
        {"FILE": str(file), "DIR": str(tmp_path), "KEYS": str(keys), "TRACE": str(trace)}.get(word, word)
        for word in command
    ]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert "it is a FIFO, a socket or a device, not a file" in done.stderr
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr
