import os
import sys

import sharded_training
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

form, source, target = sys.argv[1:]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(1234)
training = sharded_training.FORMS[form]()
for one in training.optimizers:
    torch.optim.lr_scheduler.StepLR(one, 2, 0.9)  # it notes its own in the groups
model, optim = get_state_dict(training.model, training.optimizers)
load({"model": model, "optim": optim}, checkpoint_id=source)
set_state_dict(training.model, training.optimizers, model_state_dict=model, optim_state_dict=optim)
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
model, optim = get_state_dict(training.model, training.optimizers, options=whole)
if dist.get_rank() == 0:
    torch.save({"model": model, "optim": optim}, target)
dist.destroy_process_group()
