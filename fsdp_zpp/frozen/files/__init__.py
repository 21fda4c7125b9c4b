"""Files and state dicts of a frozen base: what is read to quantize it, and how it is saved once it is quantized.

- A quantized base: ``saving.py`` and ``loading.py`` have the public functions, ``file_format.py`` defines the files,
  ``base_writer.py`` writes them, ``drafts.py`` has several jobs save into one folder.
- A checkpoint: ``source.py`` reads it, ``decoded_files.py`` what is quantized in it, ``expert_stacks.py`` the experts.
- Both: ``tensor_files.py`` reads safetensors, ``model_tensors.py`` names the tensors of a model, ``completeness.py``
  checks that files have them all.
- Checkpoints of what is trained: ``identity.py`` tells bases apart, ``whole_state_dicts.py`` adds the base to a state
  dict, or skips it.
"""
