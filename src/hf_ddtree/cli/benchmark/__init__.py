"""`hf-ddtree bench`: what is measured, how it is kept, and the figures made of it."""
