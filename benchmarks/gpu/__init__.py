"""A proof of gradtide on one GPU, in minutes: what is right, costs and saves.

    python benchmarks/gpu --minutes 8 --out out/gpu
    python benchmarks/gpu --device cpu --tiny --minutes 4 --out out/gpu-cpu

Sections are processes of their own, in the order of their worth, each with a limit of
its own. Every figure is written as soon as it is there, into one file: `record.json` in
the folder. The same command measures what is missing there, and what failed; a copy
under `benchmarks/records/` is the record. At the end stands a table of all bars.

run.py        the sections, their processes and their time
results.py    the file, figures, bars
setting.py    on what, and how much of it; clocks, memory and waits there
model.py      what trains, and who exchanges for it
ranks.py      figures that several ranks measure together
others        one section each
"""
