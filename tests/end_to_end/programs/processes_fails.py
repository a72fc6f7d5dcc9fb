import json
import os

from jitckpt.system import process_tree

agent = int(os.environ["JITCKPT_AGENT_PID"])
facts = {
    "descriptors": len(os.listdir(f"/proc/{agent}/fd")),
    "threads": len(os.listdir(f"/proc/{agent}/task")),
    "zombies": sum(one.dead for one in process_tree.everybody() if one.parent == agent),
}
with open("facts.jsonl", "a") as file:
    print(json.dumps(facts), file=file)
if os.environ["JITCKPT_RESTART"] != "LAST":
    os.kill(os.getpid(), 9)
