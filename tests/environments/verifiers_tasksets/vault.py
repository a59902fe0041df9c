"""A task set of `verifiers` with a tool, which a server of its own runs: a number to be looked up, then said."""

import verifiers.v1 as vf


class Numbers(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = "numbers"

    @vf.tool
    async def look_up(self, name: str) -> str:
        """Return the number of `name`."""
        return str({"a": 17, "b": 4}[name])


class VaultData(vf.TaskData):
    answer: str


class VaultTask(vf.Task[VaultData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def tool_results(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class VaultConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Vault(vf.Taskset[VaultTask, VaultConfig]):
    def load(self) -> list[VaultTask]:
        return [VaultTask(VaultData(prompt=f"Number of {name}?", answer=answer)) for name, answer in (("a", "17"),)]

    @classmethod
    def toolsets(cls, config: VaultConfig) -> list[vf.Toolset]:
        return [Numbers(config.tools)]


__all__ = ["Vault"]

if __name__ == "__main__":
    Numbers.run()
