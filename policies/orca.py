"""Iteration-level batching: Orca (Yu et al., OSDI 2022, algorithm 1).

Requests join and leave the batch at every iteration, first come, first served. A new request's whole prompt is computed in
one iteration, together with the decodes of running requests. KV cache is reserved for the maximum length at admission, so
that a running request never lacks memory.

Differs from the paper: attention of several requests runs in one kernel, where Orca computes it request by request
("selective batching"); the engine, not the policy, keeps iterations in flight. Orca's code is not public.
"""

from cbatch import Plan, View, WholePrompts


class Orca(WholePrompts):
    steady = True

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        for request in view.waiting:
            if not plan.add(request, whole=True, reserve=request.max_tokens):
                break
        return plan.build()
