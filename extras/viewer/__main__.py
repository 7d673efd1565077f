from extras.viewer.viewer import main

if __name__ == "__main__":
    main()
