"""The calls of the episodes' table made by the pool, and the pool's answers taken by the table."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.core.turn_messages import Observation
from slipstream.environments.answers import Answer, Asked, LastWord, Lost, Said
from slipstream.environments.episodes import Act, EpisodeTable, Finish, Give, Open, Shut, Take
from slipstream.environments.pool import EpisodePool


def carry_out(acts: Iterable[Act], pool: EpisodePool) -> list[Observation]:
    """Make the calls among `acts`; return the observations, which are for who samples the episodes."""
    observations = []
    for act in acts:
        match act:
            case Open():
                pool.open(act.key, act.source, act.columns, keeps_state=act.keeps_state, state=act.state, turn=act.turn)
            case Take():
                pool.take(act.key, act.turn, act.message)
            case Give():
                pool.give(act.key, act.request, act.reply)
            case Finish():
                pool.finish(act.key)
            case Shut():
                pool.shut(act.key)
            case Observation():
                observations.append(act)
    return observations


def take_answer(table: EpisodeTable, answer: Answer, now_s: float) -> list[Act]:
    """Let the table take one answer of the pool; return what follows from it."""
    match answer:
        case Said():
            return table.answered(answer, now_s)
        case Asked():
            return table.asked(answer, now_s)
        case LastWord():
            return table.ended(answer, now_s)
        case Lost():
            return table.failed(answer, now_s)
