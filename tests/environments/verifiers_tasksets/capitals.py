"""A task set of `verifiers`: one turn, a capital to be named, and two rewards."""

import verifiers.v1 as vf

CAPITALS = {"France": "Paris", "Italy": "Rome", "Peru": "Lima"}


class CapitalData(vf.TaskData):
    answer: str


class CapitalTask(vf.Task[CapitalData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def first_letter(self, trace: vf.Trace) -> float:
        return float(trace.last_reply[:1] == self.data.answer[:1])

    @vf.metric
    async def num_chars(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class CapitalsConfig(vf.TasksetConfig):
    question: str = "The capital of {country}?"


class Capitals(vf.Taskset[CapitalTask, CapitalsConfig]):
    def load(self) -> list[CapitalTask]:
        return [
            CapitalTask(
                CapitalData(
                    name=country,
                    prompt=self.config.question.format(country=country),
                    system_prompt="One word.",
                    answer=capital,
                ),
                self.config.task,
            )
            for country, capital in CAPITALS.items()
        ]


__all__ = ["Capitals"]
