"""The result of a translation: contents of the three files, and what became of each setting."""

from dataclasses import dataclass, field
from typing import Any

from pretrain.config.auto_values import set_value

BECAME, DIFFERS, NONE = "became", "differs", "no counterpart"  # verdicts
RUN, JSON, MODEL = "run.yaml", "ds_config.json", "config.json"


@dataclass
class Row:
    """One setting of the other program, and its counterpart here."""

    verdict: str
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text of the counterpart, or why there is none, and how it differs."""
        return "; ".join(dict.fromkeys(self.texts))


@dataclass
class Result:
    """Grows while the parts of the translation write into it."""

    run: dict[str, Any] = field(default_factory=dict)
    json: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)  # by name of the setting; also of defaults that are written
    remaining: list[str] = field(default_factory=list)  # what the user has to do

    def set_run(self, key: str, value: Any, *names: str) -> None:
        """Write a flag into run.yaml; `names` are the settings that it comes from."""
        self.run[key] = value
        self._became(names, f"{key}: {_short(value)}")

    def set_json(self, dotted: str, value: Any, *names: str) -> None:
        """Write a key into the DeepSpeed JSON."""
        set_value(self.json, dotted, value)
        self._became(names, f"{JSON} {dotted}: {_short(value)}")

    def set_model(self, key: str, value: Any, *names: str) -> None:
        """Write a key into the config.json."""
        self.model[key] = value
        self._became(names, f"{MODEL} {key}: {_short(value)}")

    def used(self, text: str, *names: str) -> None:
        """Record that settings are in effect, with what they became in words."""
        self._became(names, text)

    def differs(self, how: str, *names: str) -> None:
        """Record that the meaning of settings differs here."""
        for name in names:
            self._row(name, DIFFERS).verdict = DIFFERS
            self._row(name, DIFFERS).texts.append(how)

    def none(self, why: str, *names: str) -> None:
        """Record that settings have no counterpart, unless they became something."""
        for name in names:
            self._row(name, NONE).texts.append(why)

    def _row(self, name: str, verdict: str) -> Row:
        return self.rows.setdefault(name, Row(verdict))

    def _became(self, names: tuple[str, ...], text: str) -> None:
        for name in names:
            row = self._row(name, BECAME)
            row.verdict = DIFFERS if row.verdict == DIFFERS else BECAME
            row.texts.append(text)


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
