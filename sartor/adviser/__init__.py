"""The adviser: should we federate, how much should each client personalise, what will it cost?"""

from sartor.adviser.advice import Advice
from sartor.adviser.advise import advise

__all__ = ["Advice", "advise"]
