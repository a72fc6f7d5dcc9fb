"""Python runs this first in every process of a campaign or a test: most of a job is the import of torch.

A third of that, and more of a process's end, is Python's search for garbage among the objects of modules,
which are none. Searches among new objects go on as ever.
"""

import atexit
import gc

gc.set_threshold(*gc.get_threshold()[:2], 1000)
atexit.register(gc.freeze)
