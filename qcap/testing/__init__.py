"""What tests, notebooks and the demo need to run a real model on a small machine: models, an engine, and the truth from transformers.

Ships with the package, so that an extension's own tests can use it. Importing it loads neither vLLM nor transformers: each function
imports what it needs.
"""
