"""Stop strings: found wherever tokens cut them, with no more text held back than may belong to one."""

from __future__ import annotations

from collections.abc import Sequence


class _Progress:
    """How much of one stop string the end of the text matches (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * len(stop)
        for k in range(1, len(stop)):
            self._fallback[k] = self._step(self._fallback[k - 1], stop[k])

    def _step(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + (self.stop[matched] == char)

    def advance(self, char: str) -> bool:
        """Takes the text's next character; whether it completes the stop string."""
        self.matched = self._step(self.matched, char)
        return self.matched == len(self.stop)


class StopMatcher:
    """Searches one sequence's text for stop strings. The match that is complete first wins, of two the longer.

    Args:
      stop: what ends the text; none of them empty.
      include: whether the text ends after the match, and not before it.
      min_tokens: text of the first so many tokens is not searched.
    """

    def __init__(self, stop: Sequence[str], include: bool = False, min_tokens: int = 0) -> None:
        self._progress = [_Progress(text) for text in stop]
        self._first = frozenset(text[0] for text in stop)
        self._include = include
        self._unsearched = min_tokens
        self._begun = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds the text of one token; returns the text that is settled, and the stop string if the text has ended."""
        if self._unsearched:
            self._unsearched -= 1
            return text, None
        if not self._begun and self._first.isdisjoint(text):
            return text, None
        end, stop = self._search(text)
        settled = self._held + text[:end]
        if stop is not None:
            kept = 0 if self._include else len(stop)
            self._held = ""
        else:
            self._begun = max(progress.matched for progress in self._progress)
            kept = 0 if self._include else self._begun
            self._held = settled[len(settled) - kept :]
        return settled[: len(settled) - kept], stop

    def _search(self, text: str) -> tuple[int, str | None]:
        """Where the first match ends in `text`, and of which stop string."""
        for end, char in enumerate(text, 1):
            # Every one has to advance, so this must not end at the first that is complete.
            complete = [progress.stop for progress in self._progress if progress.advance(char)]
            if complete:
                return end, max(complete, key=len)
        return len(text), None

    def flush(self) -> str:
        """Ends the text; returns what was held back."""
        held, self._held = self._held, ""
        return held
