"""Formats in which checkpoints store quantized weights, and which a frozen base keeps or is encoded from anew.

``format.py`` says what a format is, ``records.py`` how codes and scales of a few values lie in bytes, ``detect.py``
which formats there are and which weights of a checkpoint have them, ``codec.py`` decodes what a base keeps as stored.
``headers.py``, ``packed_codes.py``, ``fp4_codes.py`` and ``group_order.py`` have what several formats share,
``settings.py`` and ``compressed_config.py`` what configurations say. Each other file has one format, or those of one
library. None of them knows of files, modules or ranks.

To add a format: a file with a subclass of ``StoredFormat``, and a row in the table of ``detect.py``, with all settings
that its library writes.
"""
