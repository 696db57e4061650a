"""Under which name and revision of a model pages are kept."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hicache_store import ConfigError, Namespace
from hicache_store.sglang.versions import EngineFacts

__all__ = ["draft_mark", "model_name", "namespace", "revision"]

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_WEIGHTS: Final = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json")
# A hub cache keeps "org/name" as models--org--name/snapshots/<commit>.
_HUB_FOLDER: Final = re.compile(r"models--(.+)")


def namespace(
    options: Mapping[str, Any], served_name: str | None, facts: EngineFacts, page_size: int
) -> Namespace:
    """Returns the namespace of this deployment.

    Args:
        options: The options of the backend.
        served_name: The model's name as the engine serves it.
        facts: What the engine knows.
        page_size: Tokens in a page.

    Raises:
        ConfigError: Nothing names the model, or the revision of its weights.
        NamespaceError: An unusable name, revision or salt.
    """
    path = options["model_path"] or facts.model_path
    return Namespace(
        model_name(options["model"], served_name, path),
        revision=revision(options["revision"], path, facts),
        page_size=page_size,
        salt=options["salt"],
    )


def model_name(option: str | None, served_name: str | None, path: str | None) -> str:
    """Returns the model's name: the option, else the served name, else the last parts of the path.

    Raises:
        ConfigError: There is none.
    """
    name = option or served_name or (_name_of(path) if path else None)
    if not name:
        raise ConfigError('nothing names the model: add "model": "ORGANISATION/NAME" to the options')
    return name


def revision(option: str | None, path: str | None, facts: EngineFacts) -> str:
    """Returns the revision of the weights.

    The option, else the commit of a hub snapshot, else a digest over the config and the weight files' names,
    sizes and times of a local folder.

    Raises:
        ConfigError: There is no telling.
    """
    if option:
        return option
    if path is not None and Path(path).is_dir():
        return _revision_of_folder(Path(path)) + _overridden(facts)
    if facts.revision is not None and _COMMIT.fullmatch(facts.revision):
        return facts.revision + _overridden(facts)
    found = f"{path!r} is no local folder" if path else "the engine names no model path"
    raise ConfigError(
        f'the revision of the weights is unknown ({found}): add to the options "revision" with a commit or '
        'tag of the checkpoint, or "model_path" with its folder, or "revision": "unversioned" to serve pages '
        "whatever the weights"
    )


def draft_mark(facts: EngineFacts) -> str | None:
    """Returns a few letters that stand for the draft model, or None where the engine names none."""
    if facts.draft_model is None:
        return None
    path = Path(facts.draft_model)
    told = _revision_of_folder(path) if path.is_dir() else ""
    return hashlib.sha256(f"{_name_of(facts.draft_model)}\0{told}".encode()).hexdigest()[:8]


def _overridden(facts: EngineFacts) -> str:
    """A mark where the model's config was changed on the command line: the same weights give other rows."""
    if facts.overrides is None:
        return ""
    return f"+{hashlib.sha256(facts.overrides.encode()).hexdigest()[:8]}"


def _name_of(path: str) -> str | None:
    parts = [part for part in Path(path).parts if part not in ("/", ".", "..")]
    if len(parts) >= 3 and parts[-2] == "snapshots" and (hub := _HUB_FOLDER.fullmatch(parts[-3])):
        return hub.group(1).replace("--", "/")
    return "/".join(parts[-2:]) or None


def _revision_of_folder(folder: Path) -> str:
    for place in (folder, folder.resolve()):
        if place.parent.name == "snapshots" and _COMMIT.fullmatch(place.name):
            return place.name
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    weights = sorted(file for file in folder.iterdir() if file.name.endswith(_WEIGHTS) and file.is_file())
    if not weights:
        raise ConfigError(
            f"the folder {str(folder)!r} has no weight files ({', '.join(_WEIGHTS)}) to take a revision "
            'from: add "revision" to the options'
        )
    for file in weights:
        facts = file.stat()
        digest.update(f"\0{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    return f"local-{digest.hexdigest()[:32]}"
