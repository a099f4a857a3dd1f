"""A cluster of one: one real device plays one rank of many, over a network that is described, not there.

python -m fullshard simulate gpt-124m --ranks 64 --link 50GB/s
"""
