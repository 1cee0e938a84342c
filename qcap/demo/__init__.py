"""``qcap demo``: the main job on a real model, as three processes that share nothing but a store and small JSON files.

``capture``  vLLM serves three prompts; queries, keys and values go to a store.
``analyse``  without vLLM: reads them by token ids, checks coverage, draws, drops half of the prompt's tokens, writes the edits back.
``resume``   a fresh vLLM goes on from the full and from the edited caches, and measures how far they are apart.

:func:`qcap.demo.run.run` starts them, shows their progress, and writes ``report.json`` and ``report.html``. Each stage can be run alone:
``python -m qcap.demo.capture settings.json``.
"""
