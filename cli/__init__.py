"""What all command lines share: options, the model they name, errors. Read first: options.py."""
