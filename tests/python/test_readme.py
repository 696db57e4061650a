"""The README's Python example runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_python_example_restores_what_it_backed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert example.count('"/var/cache/hicache"') == 1
    exec(example.replace('"/var/cache/hicache"', repr(str(tmp_path / "root"))), {})  # noqa: S102
    assert capsys.readouterr().out == "10 10\n"
