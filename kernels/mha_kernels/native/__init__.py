"""The implementation "native": one fused pass in C++ on the CPU. An optional extra.

`python -m mha_kernels.native` compiles it for this machine, with the C++ compiler that it finds; from then on "auto"
takes it on a CPU, and "blockwise" takes what it declines. XLA calls it through its foreign-function interface, and it
runs on XLA's own threads.

    driver.py       the two passes as a `Driver`
    operands.py     the algebra as the arrays that C++ reads
    library.py      compiling and loading
    attention.cc    tasks and tiles, forward and backward
    problem.h       what XLA hands over; threads
    scores.h        rows of scores
    product.h       matrix products
"""

from mha_kernels.native.driver import Native

__all__ = ["Native"]
