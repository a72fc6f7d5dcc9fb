"""The hostile campaign: a job's surroundings turn against it, and it must end as if they had not.

trials.py chooses by a seed, place.py makes the hosts, job.py runs, who.py tells processes apart, attacks.py
hits them, verdict.py decides, command.py is what `scripts/fault-campaign --mode hostile` runs.
"""
