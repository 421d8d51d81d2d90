"""The exceptions that Sartor raises; `sartor.core.errors` draws their tree."""

from sartor.core.errors import *  # noqa: F403
