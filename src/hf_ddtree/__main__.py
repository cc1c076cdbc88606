"""`python -m hf_ddtree` is the `hf-ddtree` command."""

from hf_ddtree.cli import main

if __name__ == "__main__":
    main()
