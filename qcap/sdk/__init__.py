"""What a researcher sees: open a store, read the tensors, edit them, write them back. Needs no GPU, no server and no vLLM.

Everything here raises, with the next step in the message. A miss is a legal empty result (None), never an error.
"""
