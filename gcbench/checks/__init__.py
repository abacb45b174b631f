"""Does a method do what it declares? `gcbench verify` searches for inputs on which it does not."""
