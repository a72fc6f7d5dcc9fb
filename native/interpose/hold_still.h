// Signals that are meant for the agent and reach every process of the job: `scancel` and `srun --signal` send
// them to all processes of a step at once. What they mean is the agent's to decide, which gets them as well:
// it has the state saved, or ends the job. A process that ended by itself would take its state along.
#pragma once
#ifdef __cplusplus
extern "C" {
#endif

// From now on, as long as the agent lives, this process does nothing about the signal where a stranger sends
// it: a process outside of its session that is not the agent. What others send, itself among them, goes to
// whoever handled the signal before. Programs that it starts (exec) are as they were. Returns 0, or -1 if the
// kernel refuses. To be called again after something else has taken the signal.
int jitckpt_hold_still(int signal_number, int agent);

#ifdef __cplusplus
}
#endif
