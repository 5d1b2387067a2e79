"""`python -m mha_kernels.native`: compiles the native CPU implementation for this machine."""

import sys

from mha_kernels.native.library import build, reason_not_loaded

if __name__ == "__main__":
    try:
        built = build()
    except (RuntimeError, OSError) as error:
        sys.exit(f"mha_kernels.native: {error}")
    reason = reason_not_loaded()
    if reason is not None:
        sys.exit(f"mha_kernels.native: {reason}")
    print(f"{built}\nimplementation='auto' takes it on this CPU from now on.")
