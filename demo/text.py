"""The conversation: one history that two real runs share, and how each of them goes on."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

PAGE_TOKENS: Final = 64


@dataclass(frozen=True)
class Text:
    """Token ids of one history, cut at its last whole page, and of the two ways in which it goes on."""

    history: list[int]  # A/B: the system message with the policy, then the first turns; whole pages
    branch_c: list[int]
    branch_e: list[int]

    @property
    def pages(self) -> int:
        """Pages of the history."""
        return len(self.history) // PAGE_TOKENS


def read_text(tokenizer: Tokenizer) -> Text:
    """Reads `conversation.json`. What of the history does not fill a page goes to both branches."""
    story = json.loads(Path(__file__).with_name("conversation.json").read_text("utf-8"))

    def ids(part: str) -> list[int]:
        return _encode(tokenizer, "".join(map(_chatml, story[part])))

    history = ids("history")
    whole = len(history) // PAGE_TOKENS * PAGE_TOKENS
    rest, answer = history[whole:], _encode(tokenizer, "<|im_start|>assistant\n")
    return Text(history[:whole], rest + ids("branch_c") + answer, rest + ids("branch_e") + answer)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _chatml(message: dict[str, Any]) -> str:
    made = (json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", []))
    calls = "".join(f"<tool_call>{call}</tool_call>" for call in made)
    return f"<|im_start|>{message['role']}\n{message['content']}{calls}<|im_end|>\n"
