"""The reporting commands of ``kvfold``, one module each; ``add(commands)`` adds a module's parser."""
