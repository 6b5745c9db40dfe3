"""vLLM in predicted time, without a GPU: `vllm serve MODEL --distributed-executor-backend experiments.vllm_executor.SimulatedExecutor`.

The CBATCH variable names the profile: CBATCH="hardware=h200-vllm model=llama-3.1-8b vllm.simulate=true". It may also name a policy
for `--scheduler-cls experiments.vllm.PolicyScheduler`. docs/vllm.md lists the commands.
"""

from cbatch.sim import ProfileCost
from cbatch.vllm import executor
from experiments.vllm import predictions, variable


class SimulatedExecutor(executor.SimulatedExecutor):
    """Predicts iterations with the profile that CBATCH names."""

    def cost(self) -> ProfileCost:
        with variable() as overrides:
            return predictions(overrides, self.scheduler_config.max_num_seqs)
