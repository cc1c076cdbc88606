"""`hf-ddtree report`: tables and plots of what `hf-ddtree bench` measured."""
