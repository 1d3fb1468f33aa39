"""Models as other programs have them: GPT-2's weights, folders in Hugging Face's format, a page in the browser.
It owns which class of transformers computes what our settings say, and the names of its weights.
export.py, sample.py and the start of a run call it.
"""
