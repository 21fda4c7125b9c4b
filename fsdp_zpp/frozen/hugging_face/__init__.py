"""Libraries of Hugging Face on a frozen base: ``patches.py`` adapts PEFT and transformers, ``peft_saving.py`` saves."""
