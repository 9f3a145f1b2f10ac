"""Texts without secrets: logs and configuration that leave the machine."""

import re

_NAME = r"(?:authorization|api[_-]?key|token|password|secret|seed)"
_QUOTE = r"(?:\\?[\"'])"
_ITEMS = r"(?:\s*\n\s*-[ \t]+(?!-)[^\n]+)+"
_SCALAR = r"(?:\\?\"[^\"\n]*|\\?'[^'\n]*|[^\s\"',}]+)"
_SECRET = re.compile(
    rf"""(?ix)
      (?P<name> {_NAME} {_QUOTE}?\s*[:=]
        | \b name {_QUOTE}?\s*[:=]\s* {_QUOTE}? [\w-]* {_NAME} {_QUOTE}? \s*,?\s* {_QUOTE}? value {_QUOTE}?\s*[:=])
      (?P<values> {_ITEMS} | [ \t]*\[ [^\]]{{0,4000}} | (?:[ \t]*[|>][+-]?\s+)? [ \t]*
        (?:(?:bearer|basic)\s+)? {_SCALAR})
    | (?P<option> (?<![\w-])--[\w-]{{0,40}}? (?:api[_-]?key|token|password|secret) (?![\w-]))
      (?P<words> {_ITEMS} | (?:{_QUOTE}?\s*,\s*(?!{_QUOTE}?-){_SCALAR})+ | (?:[ \t]+(?!-){_SCALAR}{_QUOTE}?)+)
    | (?P<scheme>://)[^/\s:@]+:[^/\s@]+(?=@)
    | \bS[UANOCX][A-Z2-7]{{56}}\b"""
)
_WORD = re.compile(r"(?i)(?:(?:bearer|basic)\s+)?(?!-\s)(?:[^\s\"',\[\]|>\\]|\\(?![\"']|$))+")


def without_secrets(text: str) -> str:
    """Blank out passwords, tokens, API keys and NATS seeds."""

    def blank(found: re.Match[str]) -> str:
        values = found["values"] or found["words"]
        kept = found["name"] or found["option"] or found["scheme"] or ""
        return kept + (_WORD.sub("REDACTED", values) if values else "REDACTED")

    return _SECRET.sub(blank, text)
