"""`python -m dsbd_cli`: the `dsbd` command where no script is installed, such as under torchrun."""

from dsbd_cli.cli.main import main

if __name__ == "__main__":
    main()
